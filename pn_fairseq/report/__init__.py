"""The report over training runs: what ``pn report`` writes.

``runs`` reads folders of runs, ``measures`` the numbers by which they are compared, ``systems``
groups runs (those that differ only in their seed are one system), ``significance`` and
``intervals`` compare systems, ``tables`` and ``translation`` (for language models ``perplexity``)
collect what the template ``report.md.j2`` shows, ``markdown`` renders it, ``curves`` draws, and
``page`` writes the files.
"""
