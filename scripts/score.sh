#!/usr/bin/env bash
# BLEU and chrF of the hypotheses of a run, and whether runs differ significantly: pn score (pn_fairseq/pipeline/score.py).
exec bash "$(dirname "$(readlink -f "$0")")/pn" score "$@"
