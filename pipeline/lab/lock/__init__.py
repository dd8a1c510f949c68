"""What was tested, written down: `headrace lock`, and `serve`, `replay`, `diff` of what it wrote.

A lock is data. It is no signature: who can write the file can make another one.
"""
