package csrapproval

import (
	"fmt"
	"slices"

	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
)

// indexPending finds the undecided requests of a Node by its name.
const indexPending = "node"

func pendingOf(obj any) ([]string, error) {
	csr, ok := obj.(*certificatesv1.CertificateSigningRequest)
	if !ok || settled(csr) {
		return nil, nil
	}

	nodename, ok := csrpolicy.Nodename(csr)
	if !ok {
		return nil, nil
	}

	return []string{nodename}, nil
}

// subscribe has requests looked at when they appear, and when something that their verdict depends on changes.
func (c *Controller) subscribe(cfg Config) error {
	if _, err := c.requests.AddEventHandler(forEach(c.queue.Add)); err != nil {
		return fmt.Errorf("watch certificate signing requests: %w", err)
	}

	if _, err := c.nodes.AddEventHandler(forEach(c.requeueOf)); err != nil {
		return fmt.Errorf("watch nodes: %w", err)
	}

	_, err := c.nodes.AddEventHandler(cache.ResourceEventHandlerFuncs{
		UpdateFunc: func(before, after any) { c.claimsChanged(before, after) },
		DeleteFunc: func(any) { c.requeueContested() },
	})
	if err != nil {
		return fmt.Errorf("watch what nodes claim: %w", err)
	}

	cfg.Inventory.Subscribe(func(nodename string) {
		c.requeueOf(nodename)
		c.requeueContested()
	})
	cfg.Identity.Subscribe(c.Requeue)

	return nil
}

// forEach calls handle with the name of whatever appears, changes or goes.
func forEach(handle func(name string)) cache.ResourceEventHandler {
	named := func(obj any) {
		if name, err := cache.DeletionHandlingMetaNamespaceKeyFunc(obj); err == nil {
			handle(name)
		}
	}

	return cache.ResourceEventHandlerFuncs{AddFunc: named, UpdateFunc: func(_, obj any) { named(obj) }, DeleteFunc: named}
}

// requeueOf has the pending requests of a Node looked at again.
func (c *Controller) requeueOf(nodename string) {
	names, err := c.requests.GetIndexer().IndexKeys(indexPending, nodename)
	if err != nil {
		return // there is such an index
	}

	for _, name := range names {
		c.queue.Add(name)
	}
}

// requeueContested has those looked at again that another machine was in the way of: whichever it was may have changed.
func (c *Controller) requeueContested() {
	for _, name := range c.deferred.contested() {
		c.queue.Add(name)
	}
}

// claimsChanged is for every heartbeat of every Node: most change nothing of interest.
func (c *Controller) claimsChanged(before, after any) {
	old, _ := claimsOf(before)
	current, _ := claimsOf(after)

	if !slices.Equal(old, current) {
		c.requeueContested()
	}
}
