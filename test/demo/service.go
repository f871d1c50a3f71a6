package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
)

// expose makes some Nodes ready, and shows that a Service gets their public addresses.
func (d *demo) expose(ctx context.Context) error {
	const most = 3

	var (
		members      = d.fleet.members[min(1, len(d.fleet.members)-1):min(1+most, len(d.fleet.members))]
		names, wants []string
	)

	for _, m := range members {
		if err := d.setReady(ctx, m.name, corev1.ConditionTrue); err != nil {
			return err
		}

		external := addressesOf(d.observer.get(m.name).node, corev1.NodeExternalIP)
		names, wants = append(names, m.name), append(wants, external[0])
	}

	began := time.Now()
	services := d.client.CoreV1().Services(metav1.NamespaceDefault)

	_, err := services.Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: corev1.ServiceSpec{
			Type:              corev1.ServiceTypeLoadBalancer,
			LoadBalancerClass: new("talos-ccm.dev/node-ip"),
			Ports:             []corev1.ServicePort{{Port: 80}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("create service: %w", err)
	}

	var addresses []string

	err = wait.PollUntilContextCancel(ctx, poll, true, func(ctx context.Context) (bool, error) {
		service, err := services.Get(ctx, "web", metav1.GetOptions{})
		addresses = nil

		for _, ingress := range service.Status.LoadBalancer.Ingress {
			addresses = append(addresses, ingress.IP)
		}

		return slices.Equal(addresses, wants), err
	})
	if err != nil {
		return fmt.Errorf("wait for the addresses of service web: %w: %s", err, differ("ingress", addresses, wants))
	}

	d.screen.printf("\nService web of class talos-ccm.dev/node-ip got the addresses of %s, which are ready, after %s: %s",
		strings.Join(names, ", "), d.screen.in(green, inSeconds(time.Since(began))), strings.Join(addresses, ", "))

	return nil
}
