"""From published text to fairseq's binary data: ``pn prepare CORPUS``.

``recipes/`` has one module for each corpus, ``folder.py`` the steps that the recipes call in
their order.

Every step writes whole files or none and skips what is there, so that an interrupted preparation
resumes and ends in the same bytes. As many sentences come out of a step as went in; only cleaning
removes some, and says which.
"""
