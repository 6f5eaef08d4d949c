"""`make paper`: the figures that papers on batching and paging published, measured here."""
