#!/usr/bin/env bash
# Average the last checkpoints of a run: pn average.
exec bash "$(dirname "$(readlink -f "$0")")/pn" average "$@"
