"""Invariance: is a query's answer bitwise equal whatever else the same call computes?"""
