"""Pictures of plans: pure geometry from plain numbers, and two ways to show it, SVG and matplotlib.

A picture is a value: a size and marks. It knows nothing of plans. Notebooks, the page of `shardrules report` and
figures all show the same.
"""
