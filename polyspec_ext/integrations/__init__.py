"""Plug-ins of chains for other programs. Each module imports its host program."""
