"""Tests of programs: their formats, and how programs are run against them so that only data comes back."""
