"""`rlhf serve-rm`: a reward model as an HTTP server, for `reward.parts` of the kind `http` and for OpenRLHF."""
