"""The command line: turns what users write (models, rules, meshes) into objects, calls the library, prints the result.

Everything here is about words, files and terminals. The layers below compute, and do not know about any of it.
"""
