"""Plans of faults as data: when each fault is injected, which ones are skipped, and the verdict. Its drivers inject."""
