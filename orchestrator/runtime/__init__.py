"""The live shell on Ray: carries out what the core decides, and reports what happens as events. Decides nothing itself."""
