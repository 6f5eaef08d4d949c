"""The page in a real browser. A package, so that browser and servers live as long as its tests and
no longer: Playwright's loop would disturb every other test that starts one."""
