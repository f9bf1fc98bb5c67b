#!/usr/bin/env bash
# Figure 5 of the PowerNorm paper: BLEU against the tokens of a mini-batch.
exec bash "$(dirname "$(readlink -f "$0")")/pn" reproduce batch_size "$@"
