package csrapproval

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/talos-ccm/talos-ccm/pkg/claims"
	"github.com/talos-ccm/talos-ccm/pkg/csrpolicy"
	"github.com/talos-ccm/talos-ccm/pkg/inventory"
	"github.com/talos-ccm/talos-ccm/pkg/machine"
	"github.com/talos-ccm/talos-ccm/pkg/noderecord"
)

// newOwnersController returns a controller with a Node "other", whose machine does not report the addresses and names that
// the Node lists. policy is the policy of all Nodes.
func newOwnersController(policy func() csrpolicy.Policy, listed ...string) *Controller {
	c := &Controller{
		cfg: Config{
			Inventory: inventory.New(time.Now),
			Policy:    func(*corev1.Node, machine.Machine) csrpolicy.Policy { return policy() },
		},
		requests: cache.NewSharedIndexInformer(nil, &certificatesv1.CertificateSigningRequest{}, 0, cache.Indexers{}),
	}
	c.cfg.Inventory.Replace("other", machine.Machine{Nodename: "other", Endpoint: netip.MustParseAddr("10.0.0.9")})
	c.cfg.Inventory.Claims.SetNode(node("other", listed...))

	return c
}

var requesting = claims.Requester{Nodename: "requesting", UID: "requesting"}

func TestController_CountsListedValuesThatConfigurationAssigns(t *testing.T) {
	const (
		address = "10.0.0.1"
		name    = "name.example.org"
	)

	for what, test := range map[string]struct {
		subject string
		policy  csrpolicy.Policy
		want    bool
	}{
		"nothing":                           {address, csrpolicy.Policy{}, false},
		"address that the operator allows":  {address, csrpolicy.Policy{ExtraIPs: []netip.Addr{netip.MustParseAddr("::ffff:10.0.0.1")}}, true},
		"another address":                   {address, csrpolicy.Policy{ExtraIPs: []netip.Addr{netip.MustParseAddr("10.0.0.2")}}, false},
		"name that a rule assigns":          {name, csrpolicy.Policy{ExtraNames: []string{"Name.example.org"}}, true},
		"the same, from incomplete facts":   {name, csrpolicy.Policy{PendingNames: []string{name}}, true},
		"address that Node does not list":   {"10.0.0.2", csrpolicy.Policy{ExtraIPs: []netip.Addr{netip.MustParseAddr("10.0.0.2")}}, false},
		"name of the Node is always listed": {"other", csrpolicy.Policy{}, true},
	} {
		c := newOwnersController(func() csrpolicy.Policy { return test.policy }, address, name)

		want := map[string]time.Time{}
		if test.want {
			want["other"] = time.Time{}
		}

		assert.Equal(t, want, c.ownersOf(test.subject, requesting, map[string]csrpolicy.Policy{}), what)
	}
}

// A Node can list the addresses of a request that its machine does not report. To evaluate a policy takes milliseconds.
func TestController_EvaluatesPolicyOncePerRequest(t *testing.T) {
	evaluated, policies := 0, map[string]csrpolicy.Policy{}
	addresses := []string{"10.0.0.1", "10.0.0.2", "fd00::1"}
	c := newOwnersController(func() csrpolicy.Policy {
		evaluated++

		return csrpolicy.Policy{}
	}, addresses...)

	for _, subject := range addresses {
		assert.Empty(t, c.ownersOf(subject, requesting, policies), subject)
	}

	assert.Equal(t, 1, evaluated)
}

// The Node is deleted after its claims were read and before its policy is evaluated, which may depend on its machine.
func TestController_CountsListedValueIfMachineWasForgotten(t *testing.T) {
	c := newOwnersController(func() csrpolicy.Policy { return csrpolicy.Policy{} }, "10.0.0.1")
	owners, contradicted := c.cfg.Inventory.Claims.Of("10.0.0.1", requesting)
	assert.Empty(t, owners)
	require.Len(t, contradicted, 1)

	assert.False(t, c.assigns(contradicted[0], "10.0.0.1", map[string]csrpolicy.Policy{}))
	c.cfg.Inventory.Forget("other")
	assert.True(t, c.assigns(contradicted[0], "10.0.0.1", map[string]csrpolicy.Policy{}))
}

// The recorded machine reports another address, and its record has not followed yet.
func TestController_CountsRecordedAddressOfMachineElsewhere(t *testing.T) {
	c := newOwnersController(func() csrpolicy.Policy { return csrpolicy.Policy{} })
	m := machine.Machine{Nodename: "other", EphemeralID: "volume", Endpoint: netip.MustParseAddr("10.0.0.9")}
	recorded := node("other")
	recorded.Labels = map[string]string{}

	for key, value := range (noderecord.Record{Address: netip.MustParseAddr("10.0.0.1"), Volume: noderecord.ID([]byte("volume"))}).ByLeader() {
		if text, ok := value.(string); ok {
			recorded.Labels[key] = text
		}
	}

	c.cfg.Inventory.Claims.SetNode(recorded)

	owners := func() map[string]time.Time { return c.ownersOf("10.0.0.1", requesting, map[string]csrpolicy.Policy{}) }
	assert.Contains(t, owners(), "other")

	c.cfg.Inventory.Replace("other", m)
	assert.Contains(t, owners(), "other")

	c.cfg.Inventory.MarkUnreachable("other", "gone")
	assert.Contains(t, owners(), "other")
}

func TestController_KeepsClaimsOfDeletedNode(t *testing.T) {
	c := newOwnersController(func() csrpolicy.Policy { return csrpolicy.Policy{} })
	old, recreated := node("other", "10.0.0.1"), node("other", "10.0.0.2")
	old.UID, recreated.UID = "old", "new"
	owners := func() map[string]time.Time { return c.ownersOf("10.0.0.1", requesting, map[string]csrpolicy.Policy{}) }

	c.cfg.Inventory.Claims.SetNode(old)
	c.cfg.Inventory.Claims.SetNode(old.DeepCopy())
	assert.Empty(t, owners())

	before := time.Now()
	c.cfg.Inventory.Claims.DeleteNode(old)
	c.cfg.Inventory.Claims.SetNode(recreated)
	assert.WithinRange(t, owners()["other"], before.Add(claims.Retention), time.Now().Add(claims.Retention))
}
