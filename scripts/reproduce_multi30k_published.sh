#!/usr/bin/env bash
exec bash "$(dirname "$(readlink -f "$0")")/pn" reproduce multi30k_published "$@"
