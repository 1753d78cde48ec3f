"""The seams: Protocols of rollout backends, training engines, rewards, environments and losses."""
