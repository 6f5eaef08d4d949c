"""The page in a real browser. A package, so that browser and servers last as long as it does and no
longer: Playwright's loop would be in the way of every other test that starts one."""
