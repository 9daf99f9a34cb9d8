"""SkyPilot. Only the files of this package import `sky`, and only when they are used.

A package and not one file: what prices are (`prices`) and what clusters do are two things.
"""
