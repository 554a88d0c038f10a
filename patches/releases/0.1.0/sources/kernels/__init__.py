"""CUDA sources of ours and the modules that build and call them.

A kernel travels as source. It is compiled on the machine that runs it, by that machine's nvcc, on first use.
"""
