"""`make paper`: what the papers on batching and paging published, measured here."""
