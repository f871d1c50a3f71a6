package csrapproval

import "github.com/talos-ccm/talos-ccm/pkg/inventory"

// FormerCondition returns the condition of the machine of a deleted Node.
func FormerCondition(c *Controller, nodename string) inventory.Condition {
	return c.owners.former.Get(nodename).Condition
}
