package main

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"
)

// change changes one machine and shows how fast its Node follows.
func (d *demo) change(ctx context.Context) error {
	m := d.fleet.changing

	d.screen.printf("\nUpdates of machine %s and the time until its Node was updated:", m.name)

	for _, change := range []func(context.Context, *member) error{d.changeCapacity, d.addAddress} {
		if err := change(ctx, m); err != nil {
			return fmt.Errorf("change machine %s: %w", m.name, err)
		}
	}

	return nil
}

// changeCapacity makes the machine a spot instance, which a rule makes a label.
func (d *demo) changeCapacity(ctx context.Context, m *member) error {
	before := d.observer.get(m.name).node.Labels[labelCapacity]

	took, err := d.follow(ctx,
		func(e *expectation) { e.labels[labelLifecycle], e.labels[labelCapacity] = "spot", "spot" },
		func() error {
			return m.machine.UpdatePlatform(ctx, func(spec *runtime.PlatformMetadataSpec) { spec.Spot = true })
		})
	if err != nil {
		return err
	}

	d.screen.printFollowed("capacity", before, d.observer.get(m.name).node.Labels[labelCapacity], took)

	return nil
}

// addAddress gives the machine one more public address.
func (d *demo) addAddress(ctx context.Context, m *member) error {
	var (
		link    = m.origin.addresses[0].Link
		address = netip.MustParseAddr("203.0.113.250")
		before  = addressesOf(d.observer.get(m.name).node, corev1.NodeExternalIP)
	)

	took, err := d.follow(ctx,
		func(e *expectation) {
			e.addresses[corev1.NodeExternalIP] = append(e.addresses[corev1.NodeExternalIP], address.String())
		},
		func() error { return m.machine.AddAddress(ctx, link, netip.PrefixFrom(address, address.BitLen())) })
	if err != nil {
		return err
	}

	after := addressesOf(d.observer.get(m.name).node, corev1.NodeExternalIP)
	d.screen.printFollowed("external", orDash(strings.Join(before, ",")), strings.Join(after, ","), took)

	return d.recertify(ctx, m)
}

// recertify waits until the machine's kubelet has a certificate for what its Node lists now.
func (d *demo) recertify(ctx context.Context, m *member) error {
	if err := d.awaitDone(ctx, m.name); err != nil {
		return err
	}

	r := d.observer.get(m.name).certificate
	d.screen.printf("  new certificate with the added address: issued after %s", d.screen.in(green, inSeconds(r.issued.Sub(r.asked))))

	return nil
}

// follow makes a change to the changing machine and returns how long it took until its Node was as it should be.
func (d *demo) follow(ctx context.Context, should func(*expectation), change func() error) (time.Duration, error) {
	name := d.fleet.changing.name
	d.observer.expect(name, should)

	began := time.Now()

	if err := change(); err != nil {
		return 0, err
	}

	err := d.await(ctx, func() bool { return len(d.observer.get(name).wrong) == 0 })
	if err != nil {
		return 0, fmt.Errorf("%w: %s", err, strings.Join(d.observer.get(name).wrong, "; "))
	}

	return time.Since(began), nil
}
