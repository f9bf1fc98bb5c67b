#!/usr/bin/env bash
# The whole pipeline on the corpus in the repository: prepare, train, average, decode, score. Called by `make demo`.
exec bash "$(dirname "$(readlink -f "$0")")/pn" reproduce demo "$@"
