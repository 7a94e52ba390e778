"""BLOOM, MPT and Falcon with their slopes as a prior: their layers around our attention."""
