package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	corev1 "k8s.io/api/core/v1"
)

// retire renames a machine and resets another one. talos-ccm deletes their Nodes after the grace period.
func (d *demo) retire(ctx context.Context) error {
	var reset *member

	switch members := d.fleet.members; {
	case len(members) < minRename:
		return nil
	case len(members) >= minReset:
		reset = members[resetIndex]
		reset.remark = "reset"

		// It is switched off when talos-ccm has reacted to a later change, the renaming.
		if err := reset.machine.SetStage(ctx, runtime.MachineStageResetting); err != nil {
			return err
		}
	}

	if err := d.rename(ctx, lateIndex); err != nil {
		return err
	}

	if reset != nil {
		d.leaving = append(d.leaving, reset.name)

		if err := reset.machine.Stop(ctx); err != nil {
			return err
		}
	}

	for _, name := range d.leaving {
		if err := d.setReady(ctx, name, corev1.ConditionUnknown); err != nil {
			return err
		}

		if err := d.await(ctx, func() bool { return d.observer.get(name).verdict != "" }); err != nil {
			return fmt.Errorf("wait for Event %s of node %s: %w", reasonGone, name, err)
		}

		d.screen.printf("  %s  %s", name, d.observer.get(name).verdict)
	}

	return nil
}

// setReady sets a Node's Ready condition: Unknown is what Kubernetes does when the kubelet no longer reports.
func (d *demo) setReady(ctx context.Context, name string, status corev1.ConditionStatus) error {
	patch := fmt.Sprintf(`{"status":{"conditions":[{"type":"Ready","status":%q}]}}`, status)

	if _, err := d.client.CoreV1().Nodes().PatchStatus(ctx, name, []byte(patch)); err != nil {
		return fmt.Errorf("set readiness of node %s: %w", name, err)
	}

	return nil
}

// rename gives a machine another nodename, and registers the Node of that name as its kubelet does.
func (d *demo) rename(ctx context.Context, index int) error {
	former := d.observer.get(d.fleet.members[index].name)

	m := *former.member
	m.name = strings.Replace(m.name, m.origin.platform.Platform, "worker", 1)
	m.remark = "was " + former.member.name
	m.expected = m.expectation()
	m.expected.providerID = "" // as long as the former Node has it

	d.fleet.members[index] = &m
	d.leaving = append(d.leaving, former.member.name)
	d.observer.add(&m, former.requests)

	began := time.Now()

	if err := m.machine.SetNodename(ctx, m.name); err != nil {
		return err
	}

	if err := d.register(ctx, &m); err != nil {
		return err
	}

	err := d.await(ctx, func() bool { return d.observer.get(m.name).verdict != "" && len(d.observer.get(m.name).wrong) == 0 })
	if err != nil {
		return fmt.Errorf("rename machine %s: %w: %s", former.member.name, err, strings.Join(d.observer.get(m.name).wrong, "; "))
	}

	d.screen.printf("\nLifecycle: machine %s is renamed to %s, whose Node was initialized without providerID after %s",
		former.member.name, m.name, d.screen.in(green, inSeconds(time.Since(began))))
	d.screen.printf("  %s  %s", m.name, d.observer.get(m.name).verdict)

	return nil
}

// awaitDeletions waits until the Nodes are deleted and the renamed machine's Node has the providerID.
func (d *demo) awaitDeletions(ctx context.Context) error {
	if len(d.leaving) == 0 {
		return nil
	}

	waiting := func(*screen) []string {
		return []string{"waiting for the deletion of " + strings.Join(d.leaving, " and ") + " after the grace period"}
	}

	err := d.screen.during(waiting, func() error {
		for _, name := range d.leaving {
			if err := d.await(ctx, func() bool { return !d.observer.get(name).deleted.IsZero() }); err != nil {
				return fmt.Errorf("wait for the deletion of node %s: %w", name, err)
			}
		}

		return nil
	})
	if err != nil {
		return err
	}

	d.screen.printf("\nNodes deleted after the grace period:")

	for _, name := range d.leaving {
		r := d.observer.get(name)
		d.screen.printf("  %s  %s after %s", name, d.screen.in(green, inSeconds(r.deleted.Sub(r.judged))), reasonGone)
	}

	renamed := d.fleet.members[lateIndex]
	d.observer.expect(renamed.name, func(e *expectation) { e.providerID = renamed.origin.providerID })

	if err := d.awaitDone(ctx, renamed.name); err != nil {
		return fmt.Errorf("wait for the providerID of node %s: %w", renamed.name, err)
	}

	d.screen.printf("  %s  got providerID %s and a serving certificate", renamed.name, d.observer.get(renamed.name).node.Spec.ProviderID)

	return nil
}
