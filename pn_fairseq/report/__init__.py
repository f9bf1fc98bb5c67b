"""The report over training runs: what ``pn-report`` writes.

``runs`` reads run directories, ``systems`` groups them (runs that differ by nothing but their seed are one system),
``significance`` compares systems, ``paper`` holds the published numbers, ``curves`` draws, ``document`` says what the
report says, and ``page`` writes that as Markdown and as HTML.
"""
