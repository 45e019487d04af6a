"""The languages everything else speaks: graphs, placements, the index notation, rules, programs."""
