"""Other frameworks' command lines and files, as configurations of ours: a table of their settings for each, and one
engine that applies a table.

Their settings are facts that their documentation and sources state; no code of theirs is here.
"""
