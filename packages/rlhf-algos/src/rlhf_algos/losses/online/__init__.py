"""Losses on samples of the policy: policy, value and pretraining losses."""
