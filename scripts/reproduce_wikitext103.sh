#!/usr/bin/env bash
# Table 3 of the paper, WikiText-103: the tensorized transformer, but causal (docs/language_modeling.md).
exec bash "$(dirname "$(readlink -f "$0")")/pn" reproduce wikitext103 "$@"
