#!/usr/bin/env bash
# BLEU and chrF of a run, and whether runs differ significantly: pn score.
exec bash "$(dirname "$(readlink -f "$0")")/pn" score "$@"
