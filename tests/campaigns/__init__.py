"""Campaigns: scripts that try hard to break a promise; their results stand in docs/, and samples of them are run with the tests."""
