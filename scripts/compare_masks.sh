#!/usr/bin/env bash
# BN and PN with and without the padding mask, in two kinds of batches.
exec bash "$(dirname "$(readlink -f "$0")")/pn" reproduce compare_masks "$@"
