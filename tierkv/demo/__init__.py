"""`tierkv demo`: the main job, shown with real processes on this machine."""
