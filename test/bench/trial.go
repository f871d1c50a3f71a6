package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/talos-ccm/talos-ccm/pkg/talostest"
	"github.com/talos-ccm/talos-ccm/test/kube"
)

const (
	// restartDelay is how long Talos waits before it restarts a service.
	restartDelay = 5 * time.Second

	// unmanaged is a Node that does not run Talos.
	unmanaged = "unmanaged"

	auditPolicy = `{"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"], "rules": [
		{"level": "Metadata", "verbs": ["create", "update", "patch", "delete"],
		 "resources": [{"resources": ["nodes", "nodes/status"]}, {"group": "certificates.k8s.io"}]},
		{"level": "Metadata", "verbs": ["list", "watch"], "resources": [{"resources": ["nodes"]}]},
		{"level": "None"}]}`
)

// trial is a bed on which talos-ccm runs with all of its controllers, under an auditor.
type trial struct {
	*bed
	*auditor

	executable string
	auditLog   string
	managed    []machine // whose Nodes are registered
	spare      []machine
	leader     *service
}

// newTrial starts talos-ccm and waits until the Nodes of all machines but the spare ones are initialized.
func newTrial(ctx context.Context, executable string, machines, spare int) (t *trial, err error) {
	dir := filepath.Dir(executable)
	t = &trial{executable: executable, auditLog: filepath.Join(dir, "audit.log"), auditor: newAuditor()}

	policy := filepath.Join(dir, "policy.json")
	if err := os.WriteFile(policy, []byte(auditPolicy), 0o600); err != nil {
		return nil, err
	}

	t.bed, err = newBed(ctx, machines+spare, kube.Options{
		APIServerFlags: []string{"--audit-policy-file=" + policy, "--audit-log-path=" + t.auditLog, "--audit-log-mode=blocking"},
	})
	if err != nil {
		return nil, err
	}

	t.managed, t.spare = t.machines[:machines], t.machines[machines:]

	for _, m := range t.machines {
		t.expected[m.Nodename()] = &expectation{addresses: m.nodeIPs()}
	}

	t.try(func() error {
		_, err := t.informers.Core().V1().Nodes().Informer().AddEventHandler(t.handler())

		return err
	})

	t.leader = t.startService(0, executable)

	t.try(func() error {
		_, err := t.cluster.RegisterNode(ctx, kube.NodeSpec{Name: unmanaged, OSImage: "Other", NodeIPs: []netip.Addr{publicAddresses.Addr()}})

		return err
	})
	t.each(t.managed, t.register)
	t.recover(t.managed)

	if t.err != nil {
		return nil, t.close()
	}

	return t, nil
}

func (t *trial) close() error {
	t.fail(t.leader.stop())

	return t.bed.close()
}

// change replaces the public address of each machine.
func (t *trial) change(machines []machine) {
	t.each(machines, func(m machine) error {
		former, public := t.replacePublic(m.Nodename())
		if former.IsValid() {
			if err := m.RemoveAddress(t.ctx, talostest.LinkExternal, host(former)); err != nil {
				return err
			}
		}

		return m.AddAddress(t.ctx, talostest.LinkExternal, host(public))
	})
}

// recreate replaces the Nodes of machines.
func (t *trial) recreate(machines []machine) {
	t.each(machines, func(m machine) error {
		if err := t.client.CoreV1().Nodes().Delete(t.ctx, m.Nodename(), metav1.DeleteOptions{}); err != nil {
			return err
		}

		return t.register(m)
	})
}

// recover waits until the Nodes of machines are up to date, and returns how long that took. It lists Nodes: after an
// outage, the auditor's informer is late, and recover waits for it, too.
func (t *trial) recover(machines []machine) (took time.Duration) {
	var (
		start    = time.Now()
		outdated []string
	)

	t.await("Nodes are up to date", 100*time.Millisecond, func() bool {
		if took == 0 {
			list, err := t.client.CoreV1().Nodes().List(t.ctx, metav1.ListOptions{ResourceVersion: "0"})
			if err != nil {
				return false // until the API server serves again
			}

			nodes := map[string]*corev1.Node{}
			for i := range list.Items {
				nodes[list.Items[i].Name] = &list.Items[i]
			}

			if outdated = t.outdated(machines, nodes); len(outdated) > 0 {
				return false
			}

			took = time.Since(start)
		}

		outdated = t.outdated(machines, t.seen())

		return len(outdated) == 0
	})

	if len(outdated) > 0 {
		t.fail(fmt.Errorf("%d Nodes are not up to date: %v", len(outdated), outdated[:min(10, len(outdated))]))
	}

	return took
}

// service is talos-ccm as a service that Talos restarts.
type service struct {
	cancel context.CancelFunc
	group  sync.WaitGroup
	err    error // of the last start that failed

	process atomic.Pointer[running]
}

// startService starts talos-ccm with pod CIDRs on a control-plane machine.
func (t *trial) startService(machine int, executable string) *service {
	ctx, cancel := context.WithCancel(t.ctx)
	s := &service{cancel: cancel}
	starts := 0

	run := func(ctx context.Context) {
		process, err := t.startProduct(executable, machine, allocating("*,nodeipam")...)
		if err != nil {
			s.err = err

			return
		}

		starts++
		process.starts = starts
		s.process.Store(process)

		select {
		case <-process.Done():
		case <-ctx.Done():
			process.Stop(context.Background())
		}
	}

	s.group.Go(func() { wait.UntilWithContext(ctx, run, restartDelay) })

	return s
}

// running returns the last process.
func (s *service) running() *running { return s.process.Load() }

func (s *service) stop() error {
	s.cancel()
	s.group.Wait()

	return s.err
}
