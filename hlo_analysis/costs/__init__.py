"""Computes the costs of a launch: FLOPs, HBM traffic, resources, roofline and estimate; and a program's memory."""
