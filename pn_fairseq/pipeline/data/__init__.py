"""From published text to fairseq's binary data: the steps that ``scripts/prepare_*.sh`` call one after the other.

Every step writes whole files or none and skips what is there, so that an interrupted preparation resumes and ends in
the same bytes. As many sentences come out of a step as went in; only cleaning removes some, and says which.
"""
