package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/workqueue"

	"github.com/talos-ccm/talos-ccm/test/screen"
)

// initialize registers all Nodes and waits until they are done.
func (d *demo) initialize(ctx context.Context) (err error) {
	began, done := time.Now(), make(chan struct{})

	if len(d.members) > lateIndex {
		go d.resolveLater(ctx, d.members[lateIndex])
	}

	go func() {
		defer close(done)

		workqueue.ParallelizeUntil(ctx, parallel, len(d.members), func(i int) {
			d.fail(d.members[i].register(ctx, d.cluster))
		})

		err = await(ctx, "all Nodes", func() bool {
			return !slices.ContainsFunc(d.watcher.list(d.members), func(r record) bool {
				return !r.reached(initialized) || !r.reached(allocated) || !r.reached(issued)
			})
		})
	}()

	// Where there is no terminal, progress is printed once a second.
	if screen.Show(done, os.Stdout, time.Second, d.progress); err != nil {
		return err
	}

	records := d.watcher.list(d.members)
	printTimes(records)
	printf("%d of %d Nodes are initialized and have pod CIDRs and serving certificates, %s after the first registration.",
		len(records), len(records), since(began))

	return nil
}

// resolveLater publishes the metadata of the late machine after an Event has reported that its Node waits for it.
func (d *demo) resolveLater(ctx context.Context, m *member) {
	err := await(ctx, "Event about pending metadata", func() bool {
		r := d.watcher.get(m.name)

		return r.reached(pending) && time.Since(r.times[pending]) > lateness
	})
	if err == nil {
		err = m.resolve(ctx)
	}

	d.fail(err)
}

// progress returns the number of Nodes that have reached each stage, and which are not initialized.
func (d *demo) progress() []string {
	const named = 3

	var waiting []string

	records := d.watcher.list(d.members)
	bar := func(title string, s stage) string {
		reached := slices.DeleteFunc(slices.Clone(records), func(r record) bool { return !r.reached(s) })

		return screen.Bar(os.Stdout, title, len(reached), len(records))
	}
	lines := []string{
		bar("Nodes registered", registered), bar("Nodes initialized", initialized), bar("pod CIDRs assigned", allocated),
		bar("CSRs approved", approved), bar("certificates issued", issued),
	}

	for _, r := range records {
		if r.reached(registered) && !r.reached(initialized) {
			waiting = append(waiting, strings.TrimSuffix(r.title+": "+r.warning, ": "))
		}
	}

	if len(waiting) > 0 {
		lines = append(lines, "waiting for initialization: "+strings.Join(waiting[:min(named, len(waiting))], ", "))
	}

	return lines
}

// change changes a machine, and prints how long it takes until its Node is updated.
func (d *demo) change(ctx context.Context) error {
	const added = "203.0.113.250"

	m := d.members[min(changingIndex, len(d.members)-1)]
	get := func() record { return d.watcher.get(m.name) }

	printf("\nUpdates of machine %s and the time until its Node was updated:", m.name)

	// The machine becomes a spot instance, for which a rule sets a label.
	began, before := time.Now(), get().node.Labels[labelCapacity]

	if err := m.machine.UpdatePlatform(ctx, func(spec *runtime.PlatformMetadataSpec) { spec.Spot = true }); err != nil {
		return err
	}

	if err := await(ctx, "capacity label", func() bool { return get().node.Labels[labelCapacity] == "spot" }); err != nil {
		return err
	}

	printf("  capacity     %s → spot after %s", before, since(began))

	began = time.Now()

	if err := m.machine.AddAddress(ctx, m.public.Link, netip.MustParsePrefix(added+"/32")); err != nil {
		return err
	}

	has := func() bool { return slices.Contains(addressesOf(get().node, corev1.NodeExternalIP), added) }
	if err := await(ctx, "added address", has); err != nil {
		return err
	}

	printf("  address      %s added after %s", added, since(began))

	renewed := func() bool { return slices.Contains(get().subjects, added) && get().reached(issued) }
	if err := await(ctx, "certificate", renewed); err != nil {
		return err
	}

	printf("  certificate  with the added address, issued %s after the CSR", get().took(requested, issued))

	return nil
}

// requestForeignName requests a certificate for the control plane with the credentials of another machine's kubelet.
func (d *demo) requestForeignName(ctx context.Context) error {
	m, victim := d.members[min(changingIndex, len(d.members)-1)], d.members[controlPlaneIndex]
	if m == victim {
		return nil
	}

	printf("\nMalicious CSR: the kubelet of %s requests a serving certificate for the name and address of %s", m.name, victim.name)

	if _, err := d.cluster.RequestServingCertificate(ctx, m.name, "malicious", victim.name, victim.private.String()); err != nil {
		return err
	}

	return wait.PollUntilContextCancel(ctx, poll, true, func(ctx context.Context) (bool, error) {
		csr, err := d.client.CertificatesV1().CertificateSigningRequests().Get(ctx, "malicious", metav1.GetOptions{})
		if err != nil || len(csr.Status.Conditions) == 0 {
			return false, err
		}

		decision := csr.Status.Conditions[0]
		if decision.Type != certificatesv1.CertificateDenied {
			return false, errors.New("malicious CSR was approved")
		}

		printf("  denied: %s", decision.Message)

		return true, nil
	})
}

// expose makes some Nodes ready, and creates a Service, which gets their public addresses.
func (d *demo) expose(ctx context.Context) error {
	const most = 3

	var names []string

	for _, m := range d.members[min(1, len(d.members)-1):min(1+most, len(d.members))] {
		if err := d.setReady(ctx, m.name, corev1.ConditionTrue); err != nil {
			return err
		}

		names = append(names, m.name)
	}

	began, class := time.Now(), "talos-ccm.dev/node-ip"

	_, err := d.client.CoreV1().Services(metav1.NamespaceDefault).Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, LoadBalancerClass: &class, Ports: []corev1.ServicePort{{Port: 80}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create service: %w", err)
	}

	return wait.PollUntilContextCancel(ctx, poll, true, func(ctx context.Context) (bool, error) {
		service, err := d.client.CoreV1().Services(metav1.NamespaceDefault).Get(ctx, "web", metav1.GetOptions{})
		if err != nil || len(service.Status.LoadBalancer.Ingress) < len(names) {
			return false, err
		}

		var addresses []string
		for _, ingress := range service.Status.LoadBalancer.Ingress {
			addresses = append(addresses, ingress.IP)
		}

		printf("\nService web of class %s got the addresses of the ready Nodes %s after %s: %s",
			class, strings.Join(names, ", "), since(began), strings.Join(addresses, ", "))

		return true, nil
	})
}

// reset switches the machine off, and waits until talos-ccm has deleted its Node after the grace period.
func (d *demo) reset(ctx context.Context) error {
	if len(d.members) <= resetIndex {
		return nil
	}

	m := d.members[resetIndex]

	// As Kubernetes does when the kubelet no longer responds.
	if err := errors.Join(m.machine.Stop(ctx), d.setReady(ctx, m.name, corev1.ConditionUnknown)); err != nil {
		return err
	}

	printf("\nMachine %s was reset", m.name)

	if err := await(ctx, "Event about the reset machine", func() bool { return d.watcher.get(m.name).gone != "" }); err != nil {
		return err
	}

	began := time.Now()
	printf("  %s\n  waiting for the deletion of Node %s", d.watcher.get(m.name).gone, m.name)

	err := await(ctx, "deletion of Node "+m.name, func() bool { return d.watcher.get(m.name).reached(deleted) })
	if err == nil {
		printf("  Node %s was deleted after %s", m.name, since(began))
	}

	return err
}

// settle sets all Nodes ready, as if a CNI were installed, and removes the delay of the slow machine.
func (d *demo) settle(ctx context.Context) error {
	records := slices.DeleteFunc(d.watcher.list(d.members), func(r record) bool { return r.reached(deleted) })
	errs := make([]error, len(records))

	workqueue.ParallelizeUntil(ctx, parallel, len(records), func(i int) {
		records[i].machine.SlowDown(0)
		errs[i] = d.setReady(ctx, records[i].name, corev1.ConditionTrue)
	})

	return errors.Join(errs...)
}

func (d *demo) setReady(ctx context.Context, name string, status corev1.ConditionStatus) error {
	reason := "NodeStatusUnknown"
	if status == corev1.ConditionTrue {
		reason = "KubeletReady"
	}

	patch := fmt.Sprintf(`{"status":{"conditions":[{"type":"Ready","status":%q,"reason":%q,"message":"simulated"}]}}`, status, reason)

	if _, err := d.client.CoreV1().Nodes().PatchStatus(ctx, name, []byte(patch)); err != nil {
		return fmt.Errorf("set readiness of node %s: %w", name, err)
	}

	return nil
}
