"""`tierkv demo`: hand-off and hits in all three tiers, shown with real processes."""
