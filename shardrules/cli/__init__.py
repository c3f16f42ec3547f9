"""The command line: reads what users name in words (models, rules, meshes), asks the library, and shows what it says.

Everything here is about words, files and terminals. What is computed is computed by the layers below, which know
nothing of it.
"""
