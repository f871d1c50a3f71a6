package talosapi

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestShare_IsOwnThenCommon(t *testing.T) {
	t.Parallel()

	const ownShare, commonShare = 128 << 10, 64 << 20

	budget := Budget{Own: ownShare, Common: commonShare}
	greedy, modest := budget.NewShare(), budget.NewShare()
	assert.NoError(t, greedy.charge(ownShare+commonShare))
	assert.NoError(t, modest.charge(ownShare), "every machine has a share of its own")
	assert.NoError(t, modest.Err())

	err := modest.charge(1)
	assert.Equal(t, codes.ResourceExhausted, status.Code(err))
	assert.EqualError(t, err, modest.Err().Error(), "the reason stays")
	assert.NoError(t, greedy.charge(0))

	greedy.Release()
	greedy.Release()
	assert.Zero(t, budget.spent, "counted once")
	assert.NoError(t, greedy.charge(commonShare), "a machine without limit")
	assert.Zero(t, budget.spent)

	next := budget.NewShare()
	assert.NoError(t, next.charge(ownShare+1))
	assert.Equal(t, 1, budget.spent)
	next.Release()
	assert.Zero(t, budget.spent)
}

func TestShare_NilHasNoLimit(t *testing.T) {
	t.Parallel()

	var share *Share

	share.Release()
	assert.NoError(t, share.charge(1<<40))
	assert.NoError(t, share.Err())
}
