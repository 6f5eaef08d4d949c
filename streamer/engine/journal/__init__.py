"""The journal: what a restart needs of responses, on disk, so that they outlive the process."""
