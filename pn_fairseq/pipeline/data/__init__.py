"""From published text to fairseq's binary data: ``pn prepare CORPUS``.

``recipes/`` contains one module for each corpus, ``folder.py`` the steps that the recipes call in
their order.

Every step writes whole files or none and skips what exists, so that an interrupted preparation
resumes and ends in the same bytes. Each step returns as many sentences as it reads; only cleaning
removes some, and says which.
"""
