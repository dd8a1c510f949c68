"""Measuring: promised figures and what they are measured against."""
