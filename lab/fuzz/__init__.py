"""Bytes that nobody meant as a patch, a journal, a lock or a RECORD: read or refused, and nothing else."""
