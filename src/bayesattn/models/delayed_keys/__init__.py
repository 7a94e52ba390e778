"""Keys computed with a look-ahead, and cross layers: a variant of the published model, and the one behind bam-small."""
