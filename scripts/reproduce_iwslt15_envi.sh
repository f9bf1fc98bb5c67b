#!/usr/bin/env bash
# IWSLT15 English-Vietnamese, the tables of the AdaNorm paper.
exec bash "$(dirname "$(readlink -f "$0")")/pn" reproduce iwslt15_envi "$@"
