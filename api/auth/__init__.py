"""Who may do what: tokens, roles, the gate before all routes, the audit trail."""
