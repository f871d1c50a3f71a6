package main

import (
	"context"
	"errors"
	"fmt"
)

// errIntruded is what a demo ends with in which a machine got a certificate for another.
var errIntruded = errors.New("a hostile certificate request was approved")

// intrude has the kubelet of one machine ask for a certificate for the control plane's name and address, and shows that it gets none.
func (d *demo) intrude(ctx context.Context) error {
	m, victim := d.fleet.intruder, d.fleet.controlPlane()
	if m == nil {
		return nil
	}

	d.screen.printf("\nMalicious CSR: the kubelet of %s requests a serving certificate for the name and address of %s", m.name, victim.name)

	if err := d.kubelets.ask(ctx, m.name, d.observer.noteHostile(m.name, []string{victim.private.String(), victim.name})); err != nil {
		return err
	}

	hostile := func() request { return d.observer.get(m.name).hostile }

	if err := d.await(ctx, func() bool { return hostile().said != "" }); err != nil {
		return fmt.Errorf("wait for the verdict Event: %w", err)
	}

	d.screen.printf("  %s", hostile().said)

	// A certificate that is requested later and issued proves that the approver and the signer have processed the earlier request.
	d.observer.update(victim.name, func(r *record) { r.certificate.subjects = nil })
	d.kubelets.queue.Add(victim.name)

	if err := d.awaitDone(ctx, victim.name); err != nil {
		return fmt.Errorf("renew the certificate of %s: %w", victim.name, err)
	}

	state := hostile().state()
	if state != "pending" && state != "denied" {
		return fmt.Errorf("%w: that of %s for %s is %s", errIntruded, m.name, victim.name, state)
	}

	d.screen.printf("  The CSR was %s. A later CSR from %s for its own name and address was approved, and its certificate was issued.",
		d.screen.in(green, state), victim.name)

	return nil
}
