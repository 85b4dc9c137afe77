"""Access control: tokens, roles, the authentication middleware before all routes, and the audit trail."""
