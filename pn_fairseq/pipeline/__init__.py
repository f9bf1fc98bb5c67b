"""The experiment around the norms: data, training, decoding, scoring."""
