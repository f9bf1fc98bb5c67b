#!/usr/bin/env bash
# `pn prepare enwik8` in the project's environment; pn_fairseq/pipeline/data/recipes/enwik8.py has the steps.
exec bash "$(dirname "$(readlink -f "$0")")/pn" prepare enwik8 "$@"
